"""What processes say to each other: messages, frames, environment."""
