"""How sink, middle and window lie in memory: the middle is ragged, and packed where it is kept in few bits."""
