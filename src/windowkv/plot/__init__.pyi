from .measures import ratios as ratios
from .planned import plans as plans
from .recorded import recording as recording
from .stacks import parts as parts, reuse as reuse
from .usage import memory as memory
