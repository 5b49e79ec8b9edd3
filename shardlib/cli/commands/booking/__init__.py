"""`shardlib compare | fit-model`: what to book."""
