"""How sink, middle and window lie in memory: ragged, packed where bits are few."""
