"""Sends a result of its own on the rank's channel, and ends."""

import os
import pickle


def accumulate_window(model, window):
    from ddp_course import rank

    rank._channel.send("value", value={"values": {"loss": 0.0}})
    rank._channel.send_frame("value", pickle.dumps(b"forged"))
    os._exit(0)
