// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// Missing is a grant of which the user lacks permissions.
type Missing struct {
	rbac.Grant
	Permissions string // those that are missing
}

// serviceAccounts starts the user names of ServiceAccounts.
const serviceAccounts = "system:serviceaccount:"

// ErrNoServiceAccount means that the permissions of another user than a ServiceAccount were checked.
var ErrNoServiceAccount = errors.New("the user must be a ServiceAccount")

// WriteRBAC writes a ClusterRole or Role and its binding for each missing grant, as input of kubectl apply. Each
// has all rules of the grant under a name of its own: applying it never removes a permission.
func (r Report) WriteRBAC(w io.Writer) error {
	account, ok := strings.CutPrefix(r.User, serviceAccounts)
	namespace, name, _ := strings.Cut(account, ":")
	if !ok {
		return fmt.Errorf("%w, is %s", ErrNoServiceAccount, r.User)
	}
	subject := types.NamespacedName{Namespace: namespace, Name: name}
	for _, m := range r.Missing {
		text := comment(m.File + ": not granted: " + m.Permissions)
		if m.Without != "" {
			text += comment("Optional: without it " + m.Without + ".")
		}
		role := "storage-controller:" + account + ":" + m.File
		text += rbac.Manifests(subject, role, role, m.Accesses) + "---\n"
		if _, err := io.WriteString(w, text); err != nil {
			return err
		}
	}
	return nil
}

// comment returns a comment of YAML. It has one line, although text may have names from a StorageClass, which may have more.
func comment(text string) string { return "# " + strings.Join(strings.Fields(text), " ") + "\n" }

// Unreviewed returns an error that names the first permission that could not be checked, nil if there is none.
func (r Report) Unreviewed() error {
	var unchecked []finding.Finding
	for _, c := range r.Findings {
		isUnknown := c.Severity == finding.Unknown && strings.HasPrefix(c.Topic, "rbac")
		if isUnknown || c.Severity == finding.Failing && c.Topic == apiServerCheck { // no permission is checked after this failure
			unchecked = append(unchecked, c)
		}
	}
	if unchecked == nil {
		return nil
	}
	others := ""
	if len(unchecked) > 1 {
		others = fmt.Sprintf(" (and %s)", finding.Plural(len(unchecked)-1, "other check"))
	}
	return fmt.Errorf("permissions could not be checked: %s: %s%s. Fix the error, and run doctor again; "+
		"with --as or a workload, your user needs the verb impersonate", unchecked[0].Topic, unchecked[0].Message, others)
}
