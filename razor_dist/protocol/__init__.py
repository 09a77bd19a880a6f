"""What frontend and ranks say to each other: messages, sampling parameters, step plans."""
