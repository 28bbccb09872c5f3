"""What every room uses: errors, formatting, dtypes, finiteness, random draws, data sheets, the terminal."""
