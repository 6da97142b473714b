// Renders a chart's templates as `helm template` does, for machines without helm: text/template and sprig, as in helm,
// with include, toYaml, fromYaml, fromYamlArray and .Files.Get. The chart keeps to that; no hooks, no subcharts, no
// lookup, tpl or required. Values arrive merged, and checked against the chart's schema.
//
// stdin:  {"context": {"Values", "Release", "Chart", …}, "templates": {path: text}, "files": {path: text}}
// stdout: {path: text}; an error goes to stderr, exit 1.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"sigs.k8s.io/yaml"
)

type files map[string]string

func (f files) Get(name string) string { return f[name] }

type input struct {
	Context   map[string]interface{} `json:"context"`
	Templates map[string]string      `json:"templates"`
	Files     files                  `json:"files"`
}

func functions(root *template.Template) template.FuncMap {
	all := sprig.TxtFuncMap()
	delete(all, "env") // as helm does: a chart sees nothing of the machine
	delete(all, "expandenv")
	all["include"] = func(name string, data interface{}) (string, error) {
		var out strings.Builder
		err := root.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	all["toYaml"] = func(value interface{}) (string, error) {
		text, err := yaml.Marshal(value)
		return strings.TrimSuffix(string(text), "\n"), err
	}
	all["fromYaml"] = func(text string) (out map[string]interface{}, err error) {
		err = yaml.Unmarshal([]byte(text), &out)
		return out, err
	}
	all["fromYamlArray"] = func(text string) (out []interface{}, err error) {
		err = yaml.Unmarshal([]byte(text), &out)
		return out, err
	}
	return all
}

func render(in input) (map[string]string, error) {
	root := template.New("chart").Option("missingkey=zero")
	root.Funcs(functions(root))
	for name, text := range in.Templates {
		if _, err := root.New(name).Parse(text); err != nil {
			return nil, err
		}
	}
	in.Context["Files"] = in.Files
	out := map[string]string{}
	for name := range in.Templates {
		if strings.HasPrefix(path.Base(name), "_") {
			continue
		}
		var text strings.Builder
		if err := root.ExecuteTemplate(&text, name, in.Context); err != nil {
			return nil, err
		}
		// What a missing value becomes; helm takes it out as well.
		out[name] = strings.ReplaceAll(text.String(), "<no value>", "")
	}
	return out, nil
}

func main() {
	var in input
	err := json.NewDecoder(os.Stdin).Decode(&in)
	var out map[string]string
	if err == nil {
		out, err = render(in)
	}
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
