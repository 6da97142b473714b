{{- define "weightwire.job" -}}
{{- .Values.job | default .Release.Name -}}
{{- end -}}

{{- define "weightwire.name" -}}
{{- if contains "weightwire" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-weightwire{{ end -}}
{{- end -}}

{{- define "weightwire.coordinator" -}}
{{ include "weightwire.name" . }}-coordinator
{{- end -}}

{{/* Name of a workload's objects. Argument: (list $ name). */}}
{{- define "weightwire.workload" -}}
{{- if (first .).Values.namesByRelease }}{{ (first .).Release.Name }}-{{ end }}{{ last . -}}
{{- end -}}

{{/* Where agents and clients reach the coordinator. */}}
{{- define "weightwire.address" -}}
{{ include "weightwire.coordinator" . }}.{{ .Release.Namespace }}.svc:7411
{{- end -}}

{{- define "weightwire.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "weightwire.name" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "weightwire.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "weightwire.coordinatorImage" -}}
{{ .Values.image.repository }}:{{ .Values.coordinator.imageTag | default .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Labels of every pod: none that another version of the chart changes, or all pods would start again with it. */}}
{{- define "weightwire.lastingLabels" -}}
app.kubernetes.io/name: weightwire
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Labels of every other object. */}}
{{- define "weightwire.labels" -}}
{{ include "weightwire.lastingLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* What selects the pods of one job; role is coordinator or agent. Argument: (list $ role). */}}
{{- define "weightwire.selector" -}}
weightwire.dev/job: {{ include "weightwire.job" (first .) }}
weightwire.dev/role: {{ last . }}
{{- end -}}

{{/* Labels of a pod with an agent. Argument: (list $ component). */}}
{{- define "weightwire.podLabels" -}}
{{ include "weightwire.lastingLabels" (first .) }}
{{ include "weightwire.selector" (list (first .) "agent") }}
app.kubernetes.io/component: {{ last . }}
{{- end -}}

{{/* Security context of a container of ours; `add` are capabilities. */}}
{{- define "weightwire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{- define "weightwire.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.user }}
runAsGroup: {{ int64 .Values.user }}
fsGroup: {{ int64 .Values.user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}
