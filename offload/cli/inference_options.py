"""Help texts of the options that describe a generation, for `offload plan` and memest."""

INFERENCE = "Generating text, not training."
BATCH = "Sequences per pass."
PROMPT = "Tokens of each prompt."
NEW_TOKENS = "Tokens to generate for each."
