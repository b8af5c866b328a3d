"""The experiment: settings of a run, the catalog of algorithms, packages of others, permissions of operators."""
