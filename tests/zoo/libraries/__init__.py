"""Other people's models, of libraries that are installed for it (the extra `libraries`), a small one of each family (`make libraries`)."""
