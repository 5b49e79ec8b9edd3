"""Islands of devices that train apart: workers, parameter servers and outer steps over TCP
(`servers`), and clients that keep their rows, with Flower (`federated`).
"""
