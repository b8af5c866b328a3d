"""A site's side of a deployment: whose code runs there, and what a run can make it do.

These files are behind ``protofl site``.
"""
