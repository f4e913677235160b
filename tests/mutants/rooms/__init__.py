"""The mutants of each room: a file a room, named after it, with a list MUTANTS; objectives, a wing, has its own."""
