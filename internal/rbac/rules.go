// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package rbac

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"

	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	deploy "github.com/storage-controller/storage-controller/deploy/rbac"
)

// Rules are the rules of a ClusterRole and of a Role.
type Rules struct{ Cluster, Namespaced []rbacv1.PolicyRule }

// Directories returns the names of the directories of deploy/rbac, sorted.
func Directories() []string { return slices.Sorted(maps.Keys(directories())) }

// Of returns the rules of a directory of deploy/rbac. The caller must not change them.
func Of(directory string) Rules { return directories()[directory] }

// directories returns the rules of deploy/rbac by the names of its directories. An error in a manifest is one of the build.
var directories = sync.OnceValue(func() map[string]Rules {
	all := map[string]Rules{}
	files, err := fs.Glob(deploy.Manifests, "*/rbac.yaml")
	if err != nil {
		panic(err)
	}
	for _, file := range files {
		text, err := deploy.Manifests.ReadFile(file)
		if err != nil {
			panic(err)
		}
		rules, err := parse(string(text))
		if err != nil {
			panic(fmt.Sprintf("deploy/rbac/%s: %v", file, err))
		}
		all[path.Dir(file)] = rules
	}
	return all
})

// parse returns the rules of the ClusterRoles and Roles in a manifest.
func parse(manifest string) (Rules, error) {
	var rules Rules
	for doc := range strings.SplitSeq(manifest, "\n---\n") {
		var role rbacv1.ClusterRole // a Role has the same fields
		if err := yaml.Unmarshal([]byte(doc), &role); err != nil {
			return Rules{}, err
		}
		switch role.Kind {
		case "ClusterRole":
			rules.Cluster = append(rules.Cluster, role.Rules...)
		case "Role":
			rules.Namespaced = append(rules.Namespaced, role.Rules...)
		}
	}
	return rules, nil
}
