from shardlib.launch.joining import Joined as Joined
from shardlib.launch.joining import join as join
