"""Texts of the options that say what is to be generated: of `offload plan` and of memest."""

INFERENCE = "Generating text, not training."
BATCH = "Sequences per pass."
PROMPT = "Tokens of each prompt."
NEW_TOKENS = "Tokens to generate for each."
