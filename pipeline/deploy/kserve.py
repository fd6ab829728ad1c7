"""The same pod for KServe: a ServingRuntime, and an InferenceService that uses it, without a model server of KServe's.

KServe sends its requests to the first port of the container `kserve-container`. It makes the Deployment, the Service
and the autoscaler itself, in its mode without Knative, which would take the gateway's streams through a queue.
"""

from __future__ import annotations

import hashlib
from typing import Any

from trtpipe.pipeline.deploy.target import Target
from trtpipe.pipeline.deploy.values import to_yaml

MAIN = "kserve-container"
# What a ServingRuntime has of a pod; the InferenceService has the rest.
OF_RUNTIME = ("containers", "volumes", "nodeSelector", "tolerations", "imagePullSecrets")


def manifests(target: Target, template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The resources by file, of the pod template of the server."""
    pod = dict(template["spec"])
    *others, main = pod["containers"]
    pod["containers"] = [{**main, "name": MAIN}, *others]
    runtime = {key: pod.pop(key) for key in OF_RUNTIME if key in pod}
    least = target.config.replicas_min
    labels = target.labels()
    spec = {
        "supportedModelFormats": [{"name": target.passport.runtime}],
        "multiModel": False,
        **template["metadata"],
        **runtime,
    }
    # KServe watches InferenceServices alone: what changes in the runtime has to change in them as well.
    changes = {
        **template["metadata"]["annotations"],
        "trtpipe/runtime": hashlib.sha256(to_yaml(spec).encode()).hexdigest()[:16],
    }
    return {
        "servingruntime.yaml": {
            "apiVersion": "serving.kserve.io/v1alpha1",
            "kind": "ServingRuntime",
            "metadata": {"name": target.name, "labels": labels},
            "spec": spec,
        },
        "inferenceservice.yaml": {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": {
                "name": target.name,
                "labels": labels,
                "annotations": {
                    "serving.kserve.io/deploymentMode": "RawDeployment",
                    "serving.kserve.io/autoscalerClass": "external",
                    **changes,
                },
            },
            "spec": {
                "predictor": {
                    "minReplicas": least,
                    "maxReplicas": least,
                    "deploymentStrategy": {"type": "RollingUpdate", "rollingUpdate": target.rolling_update},
                    "model": {"modelFormat": {"name": target.passport.runtime}, "runtime": target.name},
                    **pod,
                }
            },
        },
        "kustomization.yaml": {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": target.config.namespace,
            "resources": ["servingruntime.yaml", "inferenceservice.yaml"],
        },
    }
