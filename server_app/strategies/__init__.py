"""The server half of every algorithm; the catalog says where it stands."""
