from shardlib.exchanges import Exact as Exact
from shardlib.islands.exchanges import Asynchronous as Asynchronous
from shardlib.islands.exchanges import Compressed as Compressed
from shardlib.islands.exchanges import DiLoCo as DiLoCo
from shardlib.islands.exchanges import Gossip as Gossip
from shardlib.islands.exchanges import PowerSGD as PowerSGD
from shardlib.islands.exchanges import Quantised as Quantised
from shardlib.islands.exchanges import Sign as Sign
from shardlib.islands.exchanges import TopK as TopK
from shardlib.islands.program import IslandsProgram as IslandsProgram

__all__: list[str]
