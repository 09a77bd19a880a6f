"""OpenAI's requests and answers: their types, parsing, and rendering; no HTTP."""
