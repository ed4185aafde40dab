"""A step of the engine: proposals, and the passes of the model over its sequences."""
