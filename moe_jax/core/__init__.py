"""Used by every room: errors, options of forms, formatting, dtypes, finiteness, draws, data sheets, the terminal."""
