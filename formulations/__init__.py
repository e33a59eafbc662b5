"""The problems: one paper's problem per module, as an explicit model; no solver is called here."""
