"""Used by every room: errors, formatting, dtypes, finiteness, random draws, data sheets, the terminal."""
