{{/* The agent as a native sidecar: an item of initContainers. It starts before the application, is there when the
     application starts, and stops after it. Argument: (list $ stageGiB). */}}
{{- define "weightwire.sidecar" -}}
{{- $root := first . -}}
{{- $memory := printf "%sMi" (include "weightwire.agentMiB" .) -}}
name: weightwire-agent
image: {{ include "weightwire.image" $root }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
restartPolicy: Always
command: [weightwired]
args: [--config, /etc/weightwire/agent.yaml]
env:
  - name: WEIGHTWIRE_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  - name: WEIGHTWIRE_ADVERTISE_HOST
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  # With it goes the container's memory, below.
  - name: WEIGHTWIRE_STAGE_BYTES_MAX
    value: {{ mul (int64 (last .)) 1073741824 | quote }}
  {{- with $root.Values.agent.gpu.visibleDevices }}
  - {name: NVIDIA_VISIBLE_DEVICES, value: {{ . | quote }}}
  - {name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,utility"}
  {{- end }}
  {{- with $root.Values.agent.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: ww-http, containerPort: 7412}
  - {name: ww-data, containerPort: 7413}
  {{- if has "ucx" $root.Values.agent.transports }}
  - {name: ww-ucx, containerPort: 7414}
  {{- end }}
  {{- if has "nccl" $root.Values.agent.transports }}
  - {name: ww-nccl, containerPort: 7415}
  {{- end }}
# The page answers once the sockets are open: the application finds its agent.
startupProbe:
  httpGet: {path: /healthz, port: ww-http{{ include "weightwire.scheme" $root }}}
  periodSeconds: 1
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: ww-http{{ include "weightwire.scheme" $root }}}
  periodSeconds: 10
  timeoutSeconds: 6
{{- if $root.Values.agent.readinessGatesPod }}
readinessProbe:
  httpGet: {path: /readyz, port: ww-http{{ include "weightwire.scheme" $root }}}
  periodSeconds: 5
  timeoutSeconds: 6
{{- end }}
resources:
  {{- with $root.Values.agent.gpu.claim }}
  claims: [{name: {{ . }}}]
  {{- end }}
  requests:
    cpu: {{ $root.Values.agent.cpu | quote }}
    memory: {{ $memory }}
    {{- if $root.Values.rdma.enabled }}
    {{ $root.Values.rdma.resource }}: {{ int64 $root.Values.rdma.count }}
    {{- end }}
  limits:
    memory: {{ $memory }}
    {{- if $root.Values.rdma.enabled }}
    {{ $root.Values.rdma.resource }}: {{ int64 $root.Values.rdma.count }}
    {{- end }}
securityContext:
  {{- include "weightwire.containerSecurity" (ternary (list "IPC_LOCK") list (and $root.Values.rdma.enabled $root.Values.rdma.ipcLock)) | nindent 2 }}
volumeMounts:
  - {name: weightwire-config, mountPath: /etc/weightwire, readOnly: true}
  - {name: weightwire-run, mountPath: /run/weightwire}
  {{- if has "ucx" $root.Values.agent.transports }}
  - {name: weightwire-shm, mountPath: /dev/shm}
  {{- end }}
{{- end -}}

{{/* The sidecar's volumes. Argument: (list $ devShmGiB); /dev/shm is the pod's, for NCCL, torch and UCX. */}}
{{- define "weightwire.volumes" -}}
{{- $root := first . -}}
- name: weightwire-config
  configMap:
    name: {{ include "weightwire.name" $root }}
    items: [{key: agent.yaml, path: agent.yaml}]
- name: weightwire-run
  emptyDir: {sizeLimit: 64Mi}
- name: weightwire-shm
  emptyDir: {medium: Memory, sizeLimit: {{ int64 (last .) }}Gi}
{{- end -}}

{{/* What an application's container needs beside it. */}}
{{- define "weightwire.env" -}}
- name: WEIGHTWIRE_AGENT_SOCKET
  value: /run/weightwire/agent/agent.sock
- name: WEIGHTWIRE_ADDRESS
  value: {{ include "weightwire.address" . }}
{{- end -}}

{{- define "weightwire.volumeMounts" -}}
- {name: weightwire-run, mountPath: /run/weightwire}
- {name: weightwire-shm, mountPath: /dev/shm}
{{- end -}}

{{/* Certificates, for weightwired, wwctl and the Python client alike. */}}
{{- define "weightwire.tlsEnv" -}}
- {name: WEIGHTWIRE_TLS_CERT, value: /run/weightwire-tls/tls.crt}
- {name: WEIGHTWIRE_TLS_KEY, value: /run/weightwire-tls/tls.key}
- {name: WEIGHTWIRE_TLS_CA, value: /run/weightwire-tls/ca.crt}
{{- end -}}

{{/* The same for who has a job token. */}}
{{- define "weightwire.tokenEnv" -}}
- {name: WEIGHTWIRE_TOKEN_FILE, value: /run/weightwire-tls/token}
- {name: WEIGHTWIRE_TLS_CA, value: /run/weightwire-tls/ca.crt}
{{- end -}}

{{- define "weightwire.tlsMount" -}}
- {name: weightwire-tls, mountPath: /run/weightwire-tls, readOnly: true}
{{- end -}}

{{/* Argument: the Secret's name. */}}
{{- define "weightwire.tlsVolume" -}}
- name: weightwire-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end -}}

{{/* Makes a rollout of the agents when their settings change. */}}
{{- define "weightwire.agentAnnotations" -}}
checksum/weightwire: {{ include "weightwire.agentFile" . | sha256sum }}
{{- end -}}

{{/* Hooks of the agent and of each application, which a kubelet starts at the same moment when it stops the pod. The agent's
     takes the pod's engines out; an application's keeps it until that is done, for what was begun needs it. */}}
{{- define "weightwire.agentPreStop" -}}
{{- $root := first . -}}
exec:
  command:
    - sh
    - -c
    - >-
      f=/run/weightwire/draining; : > $f;
      wwctl drain "$WEIGHTWIRE_NAME" --address {{ include "weightwire.address" $root }} --wait {{ last . }};
      code=$?; rm -f $f; exit $code
{{- end -}}

{{- define "weightwire.applicationPreStop" -}}
exec:
  command:
    - sh
    - -c
    - >-
      f=/run/weightwire/draining; n=0;
      while [ ! -e $f ] && [ $n -lt 2 ]; do sleep 1; n=$((n + 1)); done;
      n=0; while [ -e $f ] && [ $n -lt {{ . }} ]; do sleep 1; n=$((n + 1)); done
{{- end -}}

{{- define "weightwire.drainSeconds" -}}
{{- $workload := last . -}}
{{- ternary $workload.drainSeconds (first .).Values.agent.drainSeconds (hasKey $workload "drainSeconds") | int64 -}}
{{- end -}}

{{/* How an application's container waits until the agent has taken the pod's engines out; empty: it does not. */}}
{{- define "weightwire.waitForDrain" -}}
{{- $hook := (last .).drainHook | default (first .).Values.agent.drainHook -}}
{{- $seconds := include "weightwire.drainSeconds" . | int64 -}}
{{- if and $seconds (eq $hook "sh") -}}
{{- include "weightwire.applicationPreStop" $seconds -}}
{{- else if and $seconds (eq $hook "sleep") -}}
sleep: {seconds: {{ $seconds }}}
{{- end -}}
{{- end -}}

{{/* A workload's PodSpec with its agent. Argument: (list $ workload). */}}
{{- define "weightwire.podSpec" -}}
{{- $root := first . -}}
{{- $workload := last . -}}
{{- $pod := deepCopy $workload.podSpec -}}
{{- $env := include "weightwire.env" $root | fromYamlArray -}}
{{- $mounts := include "weightwire.volumeMounts" $root | fromYamlArray -}}
{{- $tlsEnv := list -}}
{{- $tlsMounts := list -}}
{{- $tlsVolumes := list -}}
{{- if $root.Values.tls.coordinatorSecret -}}
{{- $tlsEnv = include (ternary "weightwire.tokenEnv" "weightwire.tlsEnv" $root.Values.tls.agentTokens) $root | fromYamlArray -}}
{{- $tlsMounts = include "weightwire.tlsMount" $root | fromYamlArray -}}
{{- $tlsVolumes = include "weightwire.tlsVolume" ($workload.tlsSecret | default $root.Values.tls.agentSecret) | fromYamlArray -}}
{{- end -}}
{{- $drain := include "weightwire.drainSeconds" . | int64 -}}
{{- $waits := include "weightwire.waitForDrain" . -}}
{{- $locked := dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL")) -}}
{{- range $container := $pod.containers -}}
{{- $_ := set $container "env" (concat $env $tlsEnv ($container.env | default list)) -}}
{{- $_ := set $container "volumeMounts" (concat $mounts $tlsMounts ($container.volumeMounts | default list)) -}}
{{- $_ := set $container "securityContext" (merge ($container.securityContext | default dict) (deepCopy $locked)) -}}
{{- if and (hasKey $container.securityContext "runAsUser") (eq (int64 $container.securityContext.runAsUser) 0) (not (hasKey $container.securityContext "runAsNonRoot")) -}}
{{- $_ := set $container.securityContext "runAsNonRoot" false -}}
{{- end -}}
{{- $lifecycle := $container.lifecycle | default dict -}}
{{- if and $waits (not (hasKey $lifecycle "preStop")) -}}
{{- $_ := set $lifecycle "preStop" (fromYaml $waits) -}}
{{- $_ := set $container "lifecycle" $lifecycle -}}
{{- end -}}
{{- end -}}
{{- $stage := $workload.stageGiB | default $root.Values.agent.stageGiB -}}
{{- $sidecar := include "weightwire.sidecar" (list $root $stage) | fromYaml -}}
{{- $_ := set $sidecar "env" (concat $sidecar.env $tlsEnv) -}}
{{- $_ := set $sidecar "volumeMounts" (concat $sidecar.volumeMounts $tlsMounts) -}}
{{- if $drain -}}
{{- $_ := set $sidecar "lifecycle" (dict "preStop" (include "weightwire.agentPreStop" (list $root $drain) | fromYaml)) -}}
{{- $_ := set $pod "terminationGracePeriodSeconds" (int64 ($pod.terminationGracePeriodSeconds | default (add $drain 30))) -}}
{{- end -}}
{{- $_ := set $pod "initContainers" (prepend ($pod.initContainers | default list) $sidecar) -}}
{{- $volumes := include "weightwire.volumes" (list $root ($workload.devShmGiB | default 1)) | fromYamlArray -}}
{{- $_ := set $pod "volumes" (concat $volumes $tlsVolumes ($pod.volumes | default list)) -}}
{{- $_ := set $pod "securityContext" (merge ($pod.securityContext | default dict) (include "weightwire.podSecurity" $root | fromYaml)) -}}
{{- if not (hasKey $pod "automountServiceAccountToken") -}}
{{- $_ := set $pod "automountServiceAccountToken" false -}}
{{- end -}}
{{- if not (hasKey $pod "enableServiceLinks") -}}
{{- $_ := set $pod "enableServiceLinks" false -}}
{{- end -}}
{{- if and $root.Values.image.pullSecrets (not $pod.imagePullSecrets) -}}
{{- $_ := set $pod "imagePullSecrets" $root.Values.image.pullSecrets -}}
{{- end -}}
{{- toYaml $pod -}}
{{- end -}}

{{/* Where kinds that the chart knows keep their pod templates: a path of keys, of which * is every item of a list or map. */}}
{{- define "weightwire.templatePaths" -}}
Deployment: [spec.template]
StatefulSet: [spec.template]
Job: [spec.template]
JobSet: [spec.replicatedJobs.*.template.spec.template]
RayCluster: [spec.headGroupSpec.template, spec.workerGroupSpecs.*.template]
RayJob: [spec.rayClusterSpec.headGroupSpec.template, spec.rayClusterSpec.workerGroupSpecs.*.template]
LeaderWorkerSet: [spec.leaderWorkerTemplate.leaderTemplate, spec.leaderWorkerTemplate.workerTemplate]
PyTorchJob: [spec.pytorchReplicaSpecs.*.template]
{{- end -}}

{{/* Adds the agent to the pod templates at `path` below `at`; leaves out what is not there. Argument: (list $ name values at keys). */}}
{{- define "weightwire.addAgents" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $values := index . 2 -}}{{- $at := index . 3 -}}{{- $keys := index . 4 -}}
{{- if not $keys -}}
{{- $pod := dict "podSpec" $at.spec -}}
{{- range $key := list "stageGiB" "devShmGiB" "drainSeconds" "drainHook" "tlsSecret" -}}
{{- if hasKey $values $key -}}{{- $_ := set $pod $key (get $values $key) -}}{{- end -}}
{{- end -}}
{{- include "weightwire.checkWorkload" (list $root $name $pod) -}}
{{- $meta := $at.metadata | default dict -}}
{{- $_ := set $meta "labels" (merge (include "weightwire.podLabels" (list $root $name) | fromYaml) ($meta.labels | default dict)) -}}
{{- $_ := set $meta "annotations" (merge (include "weightwire.agentAnnotations" $root | fromYaml) ($meta.annotations | default dict)) -}}
{{- $_ := set $at "metadata" $meta -}}
{{- $_ := set $at "spec" (include "weightwire.podSpec" (list $root $pod) | fromYaml) -}}
{{- else if eq (first $keys) "*" -}}
{{- range $item := $at -}}
{{- include "weightwire.addAgents" (list $root $name $values $item (rest $keys)) -}}
{{- end -}}
{{- else if hasKey $at (first $keys) -}}
{{- include "weightwire.addAgents" (list $root $name $values (get $at (first $keys)) (rest $keys)) -}}
{{- end -}}
{{- end -}}

{{/* A manifest of the user's with an agent in each of its pods. Argument: (list $ name values). */}}
{{- define "weightwire.withAgents" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $values := index . 2 -}}
{{- $manifest := deepCopy $values.manifest -}}
{{- $known := include "weightwire.templatePaths" $root | fromYaml -}}
{{- $paths := $values.templates | default (get $known $manifest.kind) -}}
{{- if not $paths -}}
{{- fail (printf "sidecars.%s: where a %s keeps its pod templates is not known. Name them in `templates`, such as spec.template; known are %s" $name $manifest.kind (keys $known | sortAlpha | join ", ")) -}}
{{- end -}}
{{- range $path := $paths -}}
{{- include "weightwire.addAgents" (list $root $name $values $manifest (splitList "." $path)) -}}
{{- end -}}
{{- if not (contains "weightwire-agent" (toJson $manifest)) -}}
{{- fail (printf "sidecars.%s: no pod template at %s" $name (join ", " $paths)) -}}
{{- end -}}
{{- $meta := $manifest.metadata -}}
{{- if not $meta.namespace -}}{{- $_ := set $meta "namespace" $root.Release.Namespace -}}{{- end -}}
{{- if ne $meta.namespace $root.Release.Namespace -}}
{{- fail (printf "sidecars.%s: it is in namespace %s, its agents' settings and certificates are in %s" $name $meta.namespace $root.Release.Namespace) -}}
{{- end -}}
{{- toYaml $manifest -}}
{{- end -}}
