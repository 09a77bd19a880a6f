"""How much a method changes the model's distribution of the next token, on any text."""
