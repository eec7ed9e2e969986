"""Random users and random faults against a server of its own: `python -m chatpage.chaos --users 16 --seconds 1800`.

`trial` runs it, `user` and `deeds` are the users, `faults` what happens to the server, `ledger` what users were told,
`invariants` what must hold of the database and the process, `soak` the same users without faults for hours, `overload` what
happens when far more is asked than can be answered, by a `crowd`.
"""
