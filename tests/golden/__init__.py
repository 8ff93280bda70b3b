"""Golden programs: small compilations whose printed programs are kept beside the tests, and compared.

    programs/NAME.txt            the program's text, without comments
    programs/NAME.fingerprint    what it amounts to: operators, collectives, messages, memory, types of ports

A text may change where an improvement is meant to change it; a fingerprint says whether what runs has changed with it. `python -m
tests.golden` compares, and `--accept` takes what is compiled now and prints what that does to the fingerprints.
"""
