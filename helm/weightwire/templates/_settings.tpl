{{/* A setting as weightwired reads it: lists joined by commas; numbers whole, which YAML has made floating. */}}
{{- define "weightwire.setting" -}}
{{- if kindIs "slice" . -}}
{{- $items := list -}}
{{- range . -}}{{- $items = append $items (include "weightwire.setting" . | trimAll "\"") -}}{{- end -}}
{{- join "," $items | quote -}}
{{- else if kindIs "float64" . -}}
{{- int64 . | toString | quote -}}
{{- else -}}
{{- toString . | quote -}}
{{- end -}}
{{- end -}}

{{/* Settings as a file of weightwired. */}}
{{- define "weightwire.file" -}}
{{- range $key := keys . | sortAlpha }}
{{ $key }}: {{ include "weightwire.setting" (get $ $key) }}
{{- end }}
{{- end -}}

{{/* What is over TLS and what stays plaintext beside it: pages unless tls.pages, and the data plane of agents unless
     agent.config.integrity is tls. Argument: (list $ listeners). */}}
{{- define "weightwire.plaintext" -}}
{{- $tls := (first .).Values.tls -}}
{{- $plain := ternary (without (last .) "http") (last .) $tls.pages -}}
{{- if not $tls.coordinatorSecret }}
insecure: "true"
{{- else if $plain }}
allow_plaintext: {{ join "," $plain | quote }}
{{- end }}
{{- if $tls.pages }}
http_tls: "true"
{{- end }}
{{- end -}}

{{- define "weightwire.dataTls" -}}
{{- .Values.agent.config.integrity | default "" | eq "tls" -}}
{{- end -}}

{{/* The end of a probe's httpGet: the kubelet shows no certificate and checks none. */}}
{{- define "weightwire.scheme" -}}
{{- if .Values.tls.pages }}, scheme: HTTPS{{ end -}}
{{- end -}}

{{- define "weightwire.coordinatorFile" -}}
{{- $own := dict
      "role" "coordinator"
      "job" (include "weightwire.job" .)
      "listen" (printf "%s:7411" .Values.bindHost)
      "http" (printf "%s:7412" .Values.bindHost)
      | merge (include "weightwire.plaintext" (list . (list "http")) | fromYaml) -}}
{{- if .Values.coordinator.etcd -}}
{{- $_ := set $own "etcd" .Values.coordinator.etcd -}}
{{- with .Values.coordinator.etcdAccess -}}
{{- if .secret -}}{{- $_ := set $own "etcd_ca" "/run/weightwire-etcd/ca.crt" -}}{{- end -}}
{{- if .certificate -}}
{{- $_ := set $own "etcd_cert" "/run/weightwire-etcd/tls.crt" -}}
{{- $_ := set $own "etcd_key" "/run/weightwire-etcd/tls.key" -}}
{{- end -}}
{{- if .user -}}
{{- $_ := set $own "etcd_user" .user -}}
{{- $_ := set $own "etcd_password_file" "/run/weightwire-etcd/password" -}}
{{- end -}}
{{- if .serverName -}}{{- $_ := set $own "etcd_server_name" .serverName -}}{{- end -}}
{{- end -}}
{{- else -}}
{{- $_ := set $own "state_dir" "/var/lib/weightwire/journal" -}}
{{- end -}}
{{- include "weightwire.file" (merge $own .Values.coordinator.config) -}}
{{- end -}}

{{/* The users besides `user` who may attach to agents, joined by commas; they reach the socket by the pod's fsGroup. */}}
{{- define "weightwire.otherUsers" -}}
{{- if hasKey .Values.agent.config "allow_uids" -}}{{- include "weightwire.setting" .Values.agent.config.allow_uids | trimAll "\"" | nospace -}}{{- end -}}
{{- end -}}

{{- define "weightwire.agentFile" -}}
{{- $own := dict
      "role" "agent"
      "job" (include "weightwire.job" .)
      "coordinator" (include "weightwire.address" .)
      "agent_socket" "/run/weightwire/agent/agent.sock"
      "http" (printf "%s:7412" .Values.bindHost)
      "data_listen" (printf "%s:7413" .Values.bindHost)
      "ucx_listen" (printf "%s:7414" .Values.bindHost)
      "nccl_listen" (printf "%s:7415" .Values.bindHost)
      "transports" .Values.agent.transports
      | merge (include "weightwire.gpuSettings" . | fromYaml)
      | merge (include "weightwire.plaintext" (list . (ternary (list "http") (list "http" "data") (include "weightwire.dataTls" . | eq "true"))) | fromYaml) -}}
{{- if include "weightwire.otherUsers" . -}}{{- $_ := set $own "socket_group" .Values.user -}}{{- end -}}
{{- include "weightwire.file" (merge $own .Values.agent.config) -}}
{{- end -}}

{{/* Whether agents see GPUs, and what they then lend of each. */}}
{{- define "weightwire.seesGpus" -}}
{{- if or .Values.agent.gpu.claim .Values.agent.gpu.visibleDevices -}}true{{- end -}}
{{- end -}}

{{- define "weightwire.gpuSettings" -}}
{{- if include "weightwire.seesGpus" . -}}
gpu: {{ .Values.agent.config.gpu | default "required" }}
gpu_slab_bytes: {{ mul (int64 .Values.agent.gpu.slabGiB) 1073741824 }}
{{- end -}}
{{- end -}}

{{/* What an agent may take, in MiB: its stages, its slots, as many scratch slots of one chunk, CUDA's part, and itself.
     Argument: (list $ stageGiB). */}}
{{- define "weightwire.agentMiB" -}}
{{- $agent := (first .).Values.agent -}}
{{- $config := $agent.config -}}
{{- $most := max (int64 $config.chunk_bytes) (int64 ($config.segment_bytes_max | default 1048576)) -}}
{{- $slots := mul (int64 $config.slots_in_pool) (add (int64 $config.slot_bytes) $most 8192) -}}
{{- add (mul (int64 (last .)) 1024) (div (add $slots 1048575) 1048576) (int64 $agent.overheadMiB)
      (ternary (int64 $agent.gpu.hostMiB) 0 (include "weightwire.seesGpus" (first .) | eq "true")) -}}
{{- end -}}
