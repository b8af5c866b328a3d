"""A site's side of a deployment: whose code runs there, and what a run can make it do (``protofl site``).

``protofl site run`` takes the place of ``flower-supernode``. With the latter, the SuperNode starts a process for each
message that unpacks and imports the app bundle that the run brought: the code of whoever submitted it. With the former:

    flower-supernode --isolation process   talks to the SuperLink, keeps messages and bundles, starts nothing; in the
                                           process of the command, which shortens its waiting for work
    supernode.py                           its executor: asks it for work, and starts for each message
    client_process.py                      which runs the code that is installed at the site

node.py reads the options and the node config, check.py says what they allow, stored.py what a site keeps.
"""
