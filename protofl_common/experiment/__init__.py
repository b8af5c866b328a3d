"""The experiment: settings of a run, catalog of algorithms, permissions of operators, studies."""
