// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package volumerules

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
)

var scope = SecretScope{Volume: "pv1", Claim: "data", Namespace: "team", Annotations: map[string]string{"team/x": "gold"}}

func TestResolveSecrets(t *testing.T) {
	ref := func(namespace, name string) *corev1.SecretReference {
		return &corev1.SecretReference{Namespace: namespace, Name: name}
	}
	const p = ParameterPrefix
	tests := map[string]struct {
		parameters map[string]string
		want       Secrets
		err        string // part of it
	}{
		"none": {},
		"each kind": {parameters: map[string]string{
			p + "provisioner-secret-name": "a", p + "provisioner-secret-namespace": "n",
			p + "controller-publish-secret-name": "b", p + "controller-publish-secret-namespace": "n",
			p + "node-stage-secret-name": "c", p + "node-stage-secret-namespace": "n",
			p + "node-publish-secret-name": "d", p + "node-publish-secret-namespace": "n",
			p + "controller-expand-secret-name": "e", p + "controller-expand-secret-namespace": "n",
			p + "node-expand-secret-name": "f", p + "node-expand-secret-namespace": "n",
			p + "controller-modify-secret-name": "g", p + "controller-modify-secret-namespace": "n",
		}, want: Secrets{ref("n", "a"), ref("n", "b"), ref("n", "c"), ref("n", "d"), ref("n", "e"), ref("n", "f"), ref("n", "g")}},
		"default for all": {parameters: map[string]string{p + "secret-name": "s", p + "secret-namespace": "n"},
			want: Secrets{ref("n", "s"), ref("n", "s"), ref("n", "s"), ref("n", "s"), ref("n", "s"), ref("n", "s"), ref("n", "s")}},
		"one kind differs from the default": {parameters: map[string]string{
			p + "secret-name": "s", p + "secret-namespace": "n", p + "node-stage-secret-name": "o", p + "node-stage-secret-namespace": "m",
		},
			want: Secrets{ref("n", "s"), ref("n", "s"), ref("m", "o"), ref("n", "s"), ref("n", "s"), ref("n", "s"), ref("n", "s")}},
		"deprecated keys": {
			parameters: map[string]string{"csiProvisionerSecretName": "a", "csiProvisionerSecretNamespace": "n"},
			want:       Secrets{Provisioner: ref("n", "a")},
		},
		"deprecated name, prefixed namespace": {
			parameters: map[string]string{"csiProvisionerSecretName": "a", p + "provisioner-secret-namespace": "n"},
			want:       Secrets{Provisioner: ref("n", "a")},
		},
		"deprecated and prefixed name": {
			parameters: map[string]string{
				"csiProvisionerSecretName": "a", p + "provisioner-secret-name": "a", p + "provisioner-secret-namespace": "n",
			},
			err: "only one of them",
		},
		"templates": {parameters: map[string]string{
			p + "provisioner-secret-name": "${pv.name}-${pvc.namespace}-${pvc.name}-${pvc.annotations['team/x']}", p +
				"provisioner-secret-namespace": "${pvc.namespace}-$pv.name",
		}, err: "tokens"},
		"templates that are known": {parameters: map[string]string{
			p + "provisioner-secret-name": "${pv.name}-${pvc.namespace}-${pvc.name}-${pvc.annotations['team/x']}", p +
				"provisioner-secret-namespace": "${pvc.namespace}-${pv.name}",
		}, want: Secrets{Provisioner: ref("team-pv1", "pv1-team-data-gold")}},
		"annotation that the claim lacks": {
			parameters: map[string]string{
				p + "provisioner-secret-name": "${pvc.annotations['other']}", p + "provisioner-secret-namespace": "n",
			},
			err: "pvc.annotations['other']",
		},
		"name of the claim in the namespace": {
			parameters: map[string]string{p + "provisioner-secret-name": "a", p + "provisioner-secret-namespace": "${pvc.name}"},
			err:        "pvc.name",
		},
		"name without namespace": {parameters: map[string]string{p + "provisioner-secret-name": "a"}, err: "both or none"},
		"namespace without name": {
			parameters: map[string]string{p + "provisioner-secret-namespace": "a"}, err: "both or none",
		},
		"empty": {
			parameters: map[string]string{p + "provisioner-secret-name": "", p + "provisioner-secret-namespace": "n"},
			err:        "must not be empty",
		},
		"no name of a secret": {
			parameters: map[string]string{p + "provisioner-secret-name": "Bad_Name", p + "provisioner-secret-namespace": "n"},
			err:        `"Bad_Name" resolves to the invalid name "Bad_Name"`,
		},
		"no name of a namespace": {
			parameters: map[string]string{p + "provisioner-secret-name": "a", p + "provisioner-secret-namespace": "a.b"},
			err:        `secret-namespace": template "a.b" resolves to the invalid name`,
		},
		"half a default": {parameters: map[string]string{p + "secret-name": "a"}, err: "both or none"},
		"all that is wrong, not only the first": {
			parameters: map[string]string{p + "node-stage-secret-name": "a", p + "node-expand-secret-name": "a"}, err: "node-expand",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := ResolveSecrets(tt.parameters, scope)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("got %v, want an error with %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// FuzzResolveSecret never gives a name that the API server would refuse.
func FuzzResolveSecret(f *testing.F) {
	f.Add("${pv.name}", "${pvc.namespace}")
	f.Add("${", "$$")
	f.Add("${pvc.annotations['a']}", "x")
	f.Fuzz(func(t *testing.T, name, namespace string) {
		ref, err := ResolveSecret(
			Provisioner,
			map[string]string{
				ParameterPrefix + "provisioner-secret-name": name, ParameterPrefix + "provisioner-secret-namespace": namespace,
			},
			scope,
		)
		if err == nil && (ref.Name == "" || ref.Namespace == "" || strings.ContainsAny(ref.Name+ref.Namespace, "/$ _")) {
			t.Errorf("%q and %q give %v", name, namespace, ref)
		}
	})
}

func TestSecretTemplates(t *testing.T) {
	const p = ParameterPrefix
	got, err := SecretTemplates(map[string]string{
		p + "secret-name": "${pvc.name}", p + "secret-namespace": "n", "csiNodeStageSecretName": "a", "csiNodeStageSecretNamespace": "m",
	})
	if err != nil || len(got) != 7 || got[0] != (Secret{Provisioner, "n", "${pvc.name}"}) || got[2] != (Secret{NodeStage, "m", "a"}) {
		t.Errorf("got %v, error %v", got, err)
	}
	if got, err := SecretTemplates(map[string]string{p + "secret-name": "a"}); err == nil {
		t.Errorf("got %v", got)
	}
}

func TestSecretsOfVolume(t *testing.T) {
	pv := &corev1.PersistentVolume{}
	if got := SecretsOfVolume(pv).List(); got != nil {
		t.Errorf("got %v", got)
	}
	pv.Annotations = map[string]string{AnnDeletionSecretName: "a", AnnDeletionSecretNamespace: "n"}
	pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{NodeExpandSecretRef: &corev1.SecretReference{Namespace: "m", Name: "b"}}
	secrets := SecretsOfVolume(pv)
	if diff := cmp.Diff([]Secret{{Provisioner, "n", "a"}, {NodeExpand, "m", "b"}}, secrets.List()); diff != "" {
		t.Error(diff)
	}
	if secrets.Permitted([]string{"n"}) == nil || secrets.Permitted([]string{"n", "m"}) != nil || secrets.Permitted(nil) != nil {
		t.Error("Permitted")
	}
}
