"""What a placer is: the protocol, its budget and score, the registry that finds placers, and the conformance check.

The placers themselves are in ``baselines/``, one file each. Trained policies are stored in a format of this room.
"""
