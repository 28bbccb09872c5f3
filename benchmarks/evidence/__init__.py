"""Where figures come from: files of results with the commit of their code, and the pages that they stand on."""
