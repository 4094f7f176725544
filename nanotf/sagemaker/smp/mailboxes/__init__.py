"""Mailboxes: ranks send each other objects, and their owner notices ranks that wait in vain.

- `mailbox.py`: a rank's end. `letters.py`: what it sends. `outboxes.py`: how an inbox is sent to.
- `mailbox_owner.py`: the process that starts the ranks. `waits.py`: who waits for whom.
"""
