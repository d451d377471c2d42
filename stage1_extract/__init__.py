"""Stage one: run the target once over chat data and record its hidden states."""
