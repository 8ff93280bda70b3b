"""Random programs, meshes and plans, each compiled and compared with one device on simulated ranks.

    python -m meshc.testing --cases 1000 --seed 0

A case is one random program (5 to 40 operators), one mesh and one plan. What fails is made smaller, and printed as a script with its seed.
"""
