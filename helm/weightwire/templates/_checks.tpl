{{/* Combinations that would run but not be safe, or not run at all. Each fails with its reason. */}}
{{- define "weightwire.checks" -}}
{{- $values := .Values -}}
{{- if not (or $values.tls.coordinatorSecret $values.acceptPlaintext) -}}
{{- fail "no certificates: everybody who reaches the ports may read, replace or stop what is moved. Set tls.coordinatorSecret and tls.agentSecret, or acceptPlaintext=true in a network that you trust" -}}
{{- end -}}
{{- if and $values.tls.tokenKeySecret (not $values.tls.coordinatorSecret) -}}
{{- fail "tls.tokenKeySecret: tokens are taken over TLS only, for which the coordinator needs a certificate. Set tls.coordinatorSecret" -}}
{{- end -}}
{{- if and $values.tls.agentTokens (not $values.tls.tokenKeySecret) -}}
{{- fail "tls.agentTokens: the coordinator could not tell whose the agents' tokens are. Set tls.tokenKeySecret" -}}
{{- end -}}
{{- if and $values.tls.pages (not $values.tls.coordinatorSecret) -}}
{{- fail "tls.pages: pages are served with the certificates of coordinator and agents. Set tls.coordinatorSecret and tls.agentSecret" -}}
{{- end -}}
{{- if and $values.tls.pages $values.tls.agentTokens -}}
{{- fail "tls.pages: agents that have tokens have no certificate to serve their pages with. Leave tls.agentTokens or tls.pages out" -}}
{{- end -}}
{{- if and (include "weightwire.dataTls" . | eq "true") (or (not $values.tls.coordinatorSecret) $values.tls.agentTokens (has "ucx" $values.agent.transports) (has "nccl" $values.agent.transports)) -}}
{{- fail "agent.config.integrity=tls: agents show each other their certificates, over tcp. Set tls.coordinatorSecret and tls.agentSecret, and leave tls.agentTokens and the transports ucx and nccl out" -}}
{{- end -}}
{{- $scrape := $values.monitoring.podMonitor -}}
{{- if and $values.tls.pages $scrape.enabled (not $scrape.tls.secret) -}}
{{- fail "monitoring.podMonitor.tls.secret: with tls.pages nobody is shown metrics without a certificate. Name a Secret with one of role metrics" -}}
{{- end -}}
{{- if and $scrape.tls.secret (not $values.tls.pages) -}}
{{- fail "monitoring.podMonitor.tls.secret: Prometheus would speak TLS to pages in plaintext. Set tls.pages" -}}
{{- end -}}
{{- $manager := $values.tls.certManager -}}
{{- if and $manager.issuerRef.name (not $values.tls.coordinatorSecret) -}}
{{- fail "tls.certManager.issuerRef: the Secrets that it is to fill have no names. Set tls.coordinatorSecret and tls.agentSecret" -}}
{{- end -}}
{{- if and $manager.issuerRef.name $values.tls.agentTokens -}}
{{- fail "tls.certManager.issuerRef: agents that have tokens get no certificate. Leave tls.agentTokens or tls.certManager out" -}}
{{- end -}}
{{- range $name, $_ := $values.sidecars -}}
{{- if hasKey $values.workloads $name -}}
{{- fail (printf "sidecars.%s: a workload has this name too" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $workload := merge (deepCopy $values.sidecars) $values.workloads -}}
{{- if and $values.tls.coordinatorSecret (not ($workload.tlsSecret | default $values.tls.agentSecret)) -}}
{{- fail (printf "workloads.%s: its agents have no certificate, and the coordinator rejects callers without one. Set tlsSecret, or tls.agentSecret for all" $name) -}}
{{- end -}}
{{- if and (not $values.tls.coordinatorSecret) ($workload.tlsSecret | default $values.tls.agentSecret) -}}
{{- fail (printf "workloads.%s: its agents would speak TLS to a coordinator in plaintext. Set tls.coordinatorSecret" $name) -}}
{{- end -}}
{{- end -}}
{{- if and (not $values.networkPolicy.enabled) (not $values.acceptOpenNetwork) (ne $values.profile "cpu-dev") -}}
{{- fail "networkPolicy.enabled=false: every pod of the cluster could reach what is plaintext, and without tls every RPC. Leave it on, or set acceptOpenNetwork=true" -}}
{{- end -}}
{{- if and $values.networkPolicy.agentEgress.allow (not $values.networkPolicy.agentEgress.restricted) -}}
{{- fail "networkPolicy.agentEgress.allow: agents may call anybody as it is. Set networkPolicy.agentEgress.restricted=true, or leave allow out" -}}
{{- end -}}
{{- if and $values.networkPolicy.agentEgress.restricted (not $values.networkPolicy.enabled) -}}
{{- fail "networkPolicy.agentEgress.restricted: without NetworkPolicies nothing is held back. Set networkPolicy.enabled=true" -}}
{{- end -}}
{{- if lt (int $values.coordinator.replicas) 1 -}}
{{- fail "coordinator.replicas=0: nothing could be published" -}}
{{- end -}}
{{- if and (gt (int $values.coordinator.replicas) 1) (not $values.coordinator.etcd) -}}
{{- fail (printf "coordinator.replicas=%d: without etcd a job has one coordinator, for two would both decide; a restart recovers from the journal. Set coordinator.etcd, whose transactions let only the leader decide" (int $values.coordinator.replicas)) -}}
{{- end -}}
{{- if and (not $values.coordinator.etcd) (not $values.coordinator.persistence.enabled) (ne $values.profile "cpu-dev") -}}
{{- fail "coordinator.persistence.enabled=false: a coordinator that moves to another node would forget what was committed and hand out epoch numbers again. Only profile cpu-dev may do without" -}}
{{- end -}}
{{- $etcd := $values.coordinator.etcdAccess -}}
{{- if and (or $etcd.secret $etcd.certificate $etcd.user $etcd.serverName) (not $values.coordinator.etcd) -}}
{{- fail "coordinator.etcdAccess is set, and coordinator.etcd is not: name its members" -}}
{{- end -}}
{{- if and (or $etcd.certificate $etcd.user $etcd.serverName) (not $etcd.secret) -}}
{{- fail "coordinator.etcdAccess.secret is not set: it holds the CA (ca.crt), the certificate (tls.crt, tls.key) and the password that etcd asks for" -}}
{{- end -}}
{{- range $name := list "role" "job" "listen" "http" "state_dir" "etcd" "etcd_ca" "etcd_cert" "etcd_key" "etcd_server_name" "etcd_user" "etcd_password_file" "insecure" "allow_plaintext" "tls_cert" "tls_key" "tls_ca" "http_tls" "token_key" "name" -}}
{{- if hasKey $values.coordinator.config $name -}}
{{- fail (printf "coordinator.config.%s is set by the chart: use tls.pages, tls, coordinator.etcdAccess, bindHost or job, or leave it (probes, Service and volumes depend on it)" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "role" "job" "coordinator" "agent_socket" "socket_group" "http" "data_listen" "ucx_listen" "nccl_listen" "advertise_host" "transports" "stage_bytes_max" "insecure" "allow_plaintext" "tls_cert" "tls_key" "tls_ca" "http_tls" "token_file" "name" -}}
{{- if hasKey $values.agent.config $name -}}
{{- fail (printf "agent.config.%s is set by the chart: use agent.stageGiB, agent.transports, tls, tls.pages, bindHost or job, or leave it (probes, ports and memory depend on it)" $name) -}}
{{- end -}}
{{- end -}}
{{- $gpu := $values.agent.gpu -}}
{{- if and $gpu.claim $gpu.visibleDevices -}}
{{- fail "agent.gpu.claim and agent.gpu.visibleDevices are two ways to the same GPUs: set one" -}}
{{- end -}}
{{- if and (include "weightwire.seesGpus" .) (lt (int $gpu.slabGiB) 1) -}}
{{- fail "agent.gpu.slabGiB=0: the agents would see GPUs and lend nothing of them. Set it, from `wwctl plan --explain`, or leave agent.gpu out" -}}
{{- end -}}
{{- if and (not (include "weightwire.seesGpus" .)) (gt (int $gpu.slabGiB) 0) -}}
{{- fail "agent.gpu.slabGiB: no agent would see a GPU to take it of. Set agent.gpu.claim or agent.gpu.visibleDevices" -}}
{{- end -}}
{{- if and (not (include "weightwire.seesGpus" .)) (eq (toString $values.agent.config.gpu_direct) "required") -}}
{{- fail "agent.config.gpu_direct=required: no agent would see a GPU. Set agent.gpu.claim or agent.gpu.visibleDevices" -}}
{{- end -}}
{{- if and (has "nccl" $values.agent.transports) (not (include "weightwire.seesGpus" .)) -}}
{{- fail "agent.transports names nccl, and no agent would see a GPU. Set agent.gpu.claim or agent.gpu.visibleDevices, or leave nccl out" -}}
{{- end -}}
{{- if hasKey $values.agent.config "gpu_slab_bytes" -}}
{{- fail "agent.config.gpu_slab_bytes is set by the chart: use agent.gpu.slabGiB" -}}
{{- end -}}
{{- if $values.rdma.enabled -}}
{{- if not (has "ucx" $values.agent.transports) -}}
{{- fail "rdma.enabled=true, but agent.transports does not name ucx: nothing would use the devices" -}}
{{- end -}}
{{- if not $values.rdma.resource -}}
{{- fail "rdma.enabled=true needs rdma.resource, the name under which the cluster's device plugin offers RDMA devices: without it no pod gets one, and UCX falls back to tcp" -}}
{{- end -}}
{{- end -}}
{{- range $name, $workload := $values.workloads -}}
{{- include "weightwire.checkWorkload" (list $ $name $workload) -}}
{{- end -}}
{{- end -}}

{{- define "weightwire.checkWorkload" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $pod := (index . 2).podSpec -}}
{{- $user := int64 $root.Values.user -}}
{{- $drain := include "weightwire.drainSeconds" (list $root (index . 2)) | int64 -}}
{{- if and $drain $pod.terminationGracePeriodSeconds (lt (int64 $pod.terminationGracePeriodSeconds) (add $drain 10)) -}}
{{- fail (printf "workloads.%s: terminationGracePeriodSeconds %d ends before its preStop hook may, which waits %d s for the pod's engines, and 10 s more. Raise it, or set drainSeconds" $name (int64 $pod.terminationGracePeriodSeconds) $drain) -}}
{{- end -}}
{{- range $key := list "hostPID" "hostIPC" "hostNetwork" -}}
{{- if get $pod $key -}}
{{- fail (printf "workloads.%s: %s is refused: agents would see other jobs' processes, memory or ports" $name $key) -}}
{{- end -}}
{{- end -}}
{{- with $root.Values.agent.gpu.claim -}}
{{- $shared := false -}}
{{- range $container := $pod.containers -}}
{{- range $claim := ($container.resources | default dict).claims -}}
{{- if eq $claim.name $root.Values.agent.gpu.claim -}}{{- $shared = true -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $entries := list -}}
{{- range $entry := $pod.resourceClaims -}}{{- $entries = append $entries $entry.name -}}{{- end -}}
{{- if not (and $shared (has . $entries)) -}}
{{- fail (printf "workloads.%s: agent.gpu.claim is %s, and its podSpec has no such entry in resourceClaims that a container of it names in resources.claims: they would not share a GPU" $name .) -}}
{{- end -}}
{{- end -}}
{{- $contexts := dict "the pod" ($pod.securityContext | default dict) -}}
{{- range $pod.containers -}}
{{- $_ := set $contexts (printf "container %s" .name) (.securityContext | default dict) -}}
{{- end -}}
{{- range $where, $context := $contexts -}}
{{- if hasKey $context "runAsUser" -}}
{{- $named := and (ne $where "the pod") (has (toString (int64 $context.runAsUser)) (splitList "," (include "weightwire.otherUsers" $root))) -}}
{{- if and (ne (int64 $context.runAsUser) $user) (not $named) -}}
{{- fail (printf "workloads.%s: %s runs as user %d, its agent as %d: an agent hands memory only to processes of its own user. Set user, or leave runAsUser out, or name a container's user in agent.config.allow_uids" $name $where (int64 $context.runAsUser) $user) -}}
{{- end -}}
{{- end -}}
{{- if $context.privileged -}}
{{- fail (printf "workloads.%s: %s is privileged, which this chart never renders" $name $where) -}}
{{- end -}}
{{- end -}}
{{- range $container := $pod.containers -}}
{{- range $container.volumeMounts -}}
{{- if eq .mountPath "/dev/shm" -}}
{{- fail (printf "workloads.%s: container %s mounts /dev/shm, which the chart does: say how large with devShmGiB" $name $container.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $volume := $pod.volumes -}}
{{- if hasPrefix "weightwire-" $volume.name -}}
{{- fail (printf "workloads.%s: the volume name %s is the chart's own" $name $volume.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
