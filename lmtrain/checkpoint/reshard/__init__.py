"""A checkpoint written anew, in bounded memory: for another layout, or as the mean of several."""
