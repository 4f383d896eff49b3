"""Where tasks come from: files, datasets, generators. A source is a finite, ordered collection with stable ids."""
