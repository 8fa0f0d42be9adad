"""Settings of other programs: read, translated and written. No torch here."""
