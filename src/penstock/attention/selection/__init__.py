"""Choice of the tokens that a decode step reads of a long sequence."""
