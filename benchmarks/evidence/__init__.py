"""Where figures come from: files of results with the commit of their code, and the tables of BENCHMARKS.md."""
