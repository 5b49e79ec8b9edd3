"""Plans for other training frameworks: profiles that they are priced as, decisions that they can
implement, and their configurations.

catalog.py          profiles, efficiency curves and abilities, read from `profiles/`, `curves/` and
                    `abilities/`
configurations.py   the configuration of a plan in the form of its framework
"""
