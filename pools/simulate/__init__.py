"""The pools' own core in virtual time: a policy is tried before it is live (docs/simulation.md).

Nothing here knows Ray, a wall clock or chance: the same input gives the same output, byte for byte.
"""
