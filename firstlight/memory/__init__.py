"""Who owns what of a sequence: arenas per role, free lists, and the SequenceCache."""
