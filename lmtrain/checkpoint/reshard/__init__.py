"""A checkpoint written anew for another layout, in bounded memory."""
