"""A plug-in of SGLang for tests: with WEIGHTWIRE_ENGINE_GPU=1 the parameters of a scheduler stand for ones on its rank's GPU."""

import os


def register():
    if "WEIGHTWIRE_ENGINE_GPU" in os.environ:
        from gpu_standin import ParametersOnGpus

        ParametersOnGpus.install_once()
