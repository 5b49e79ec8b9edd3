"""How are collectives over the tensor axis hidden behind the matmuls that they feed (collective
matmul)?

    ring.py      pieces go around the devices of an axis
    products.py  a matmul of pieces as they come; and one whose sums go around
    matmuls.py   which matmuls of a loss gather their operand, or scatter their result, over tensor?
    groups.py    the programs that take their place

Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models", ASPLOS 2023.
"""
