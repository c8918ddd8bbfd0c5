"""Random schedules of feeding, taking back, forking, saving and reloading agree with a forward without any cache."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor

import windowkv
from tiny import WINDOW, fed, logits, shared_model, tokens
from windowkv import DynamicSlidingWindowCache, RollbackError

LONGEST = 20 * WINDOW  # texts that have reached it only go back


class Branch:
    """A cache, the text that it has seen, and the furthest position that its storage has reached."""

    def __init__(self, cache: DynamicSlidingWindowCache, ids: Tensor, furthest: int) -> None:
        self.cache, self.ids, self.furthest = cache, ids, furthest


class Schedules(RuleBasedStateMachine):
    name: str
    which = st.integers(0, 1000)

    @initialize(rollback=st.sampled_from([0, 1, 5, 64]))
    def start(self, rollback: int) -> None:
        self.model: Any = shared_model(self.name)
        cache = DynamicSlidingWindowCache(self.model.config, rollback=rollback)
        self.rollback, self.branches = rollback, [Branch(cache, tokens(1, 0), 0)]

    def branch(self, which: int) -> Branch:
        return self.branches[which % len(self.branches)]

    @rule(which=which, count=st.integers(1, 5 * WINDOW), seed=st.integers(0, 1000), singly=st.booleans())
    def feed(self, which: int, count: int, seed: int, singly: bool) -> None:
        branch = self.branch(which)
        if branch.ids.shape[1] + count > LONGEST:
            return
        count = min(count, 2 * WINDOW) if singly else count
        more = tokens(1, count, seed=seed)
        branch.ids = torch.cat((branch.ids, more), dim=1)
        out = fed(self.model, branch.cache, more, *([] if singly else [count]))
        torch.testing.assert_close(out, logits(self.model, branch.ids)[:, -count:], atol=1e-4, rtol=0)
        branch.furthest = max(branch.furthest, branch.ids.shape[1])

    @rule(which=which, count=st.integers(0, 3 * WINDOW))
    def take_back(self, which: int, count: int) -> None:
        branch = self.branch(which)
        seen = branch.ids.shape[1]
        try:
            branch.cache.crop(-count)
        except RollbackError:
            assert count > seen or seen - count < branch.furthest - self.rollback
        else:
            assert count <= seen
            branch.ids = branch.ids[:, : seen - count]
        assert branch.cache.get_seq_length() == branch.ids.shape[1]

    @rule(which=which)
    def fork(self, which: int) -> None:
        branch = self.branch(which)
        if len(self.branches) < 4:
            self.branches.append(Branch(branch.cache.fork(), branch.ids, branch.furthest))

    @rule(which=which)
    def forget(self, which: int) -> None:
        if len(self.branches) > 1:
            self.branches.remove(self.branch(which))

    @rule(which=which)
    def save_and_load(self, which: int) -> None:
        branch = self.branch(which)
        with tempfile.TemporaryDirectory() as folder:
            branch.cache.save(Path(folder) / "cache")
            branch.cache = windowkv.load(Path(folder) / "cache", self.model.config)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma3", "gemma3n", "llama4-chunk8", "gpt_oss"])
def test_any_schedule_agrees_with_a_forward_without_cache(name: str) -> None:
    machine = type("Schedules", (Schedules,), {"name": name})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
