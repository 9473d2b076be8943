// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/clock"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

const apiServerCheck = "api-server"

// connect checks the API server and creates the clients. It returns false if no further check is
// possible.
func (e *examination) connect(ctx context.Context) bool {
	const name = apiServerCheck
	fail := func(hint, format string, args ...any) bool {
		e.add(name, finding.Failing, hint, format, args...)
		return false
	}
	if e.in.Config == nil {
		return fail("run this in the pod, or set --kubeconfig", "%v", e.in.ConfigError)
	}
	host := e.in.Config.Host
	var err error
	e.Clients, err = apiread.NewClients(e.in.Config)
	if err != nil {
		return fail("check the kubeconfig", "creating the clients: %v", err)
	}
	version, code, err := e.askVersion(ctx)
	if err != nil {
		return fail("check the address, the network policies of the pod and the certificate of the API server",
			"%s does not answer: %v", host, err)
	}
	described := "version " + version
	if version == "" {
		described = fmt.Sprintf("version unknown (/version returns %d %s)", code, http.StatusText(code))
	}
	reviews := e.Kubernetes.AuthenticationV1().SelfSubjectReviews()
	review, err := reviews.Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	user := ""
	if err == nil {
		user = review.Status.UserInfo.Username
	}
	if e.User == "" && e.in.Process == nil { // that of the process may be unknown
		e.User = user
	}
	if version == "" && user == "" && !isRefusal(err) && !e.reviewsAccess(ctx) {
		return fail("check the address and its path: another server or a proxy answers",
			"%s does not answer as a Kubernetes API server: %s", host, described)
	}
	e.Reached = true
	switch {
	case apierrors.IsUnauthorized(err):
		return fail("the token is invalid: check that the ServiceAccount exists and its token is mounted",
			"%s rejects the credentials: %v", host, err)
	case err != nil: // older than 1.28
		e.ok(name, "%s, %s", host, described)
	default:
		e.ok(name, "%s, %s, authenticated as %s", host, described, user)
	}
	e.Findings = append(e.Findings, checkSkew(e.Clock.Skew()))
	return true
}

// askVersion returns the version of the API server, "" if it does not say, and the HTTP status of the response.
func (e *examination) askVersion(ctx context.Context) (version string, code int, err error) {
	body, err := e.Kubernetes.Discovery().RESTClient().Get().AbsPath("/version").Do(ctx).StatusCode(&code).Raw()
	if code == 0 {
		return "", 0, err
	}
	var answer struct{ GitVersion string }
	if err != nil || json.Unmarshal(body, &answer) != nil {
		return "", code, nil
	}
	return answer.GitVersion, code, nil
}

// reviewsAccess reports whether the server answers a SelfSubjectAccessReview as an API server does.
func (e *examination) reviewsAccess(ctx context.Context) bool {
	ask := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "get", Resource: "nodes"},
	}}
	review, err := e.Kubernetes.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, ask, metav1.CreateOptions{})
	return err == nil && review.Spec.ResourceAttributes != nil || isRefusal(err)
}

// isRefusal reports whether err is Forbidden or Unauthorized in the format of an API server.
func isRefusal(err error) bool {
	refused := apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)
	return refused && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

// The clock differences that are reported. Leases compare times of one clock only, but tokens and
// certificates do not, and ages in logs and hints would be wrong.
const (
	clockWarning = 5 * time.Second
	clockFailure = time.Minute
)

// checkSkew returns the check of a clock difference.
func checkSkew(skew time.Duration) finding.Finding {
	c := finding.Finding{Topic: "clock", Severity: finding.OK, Message: "equal to that of the API server (to a second)"}
	if skew == clock.Unknown {
		c.Severity, c.Message = finding.Unknown, "the responses of the API server have no Date"
		return c
	}
	word := "ahead of"
	if skew < 0 {
		word = "behind"
	}
	if skew.Abs() > clockWarning {
		c.Severity, c.Next = finding.Warning, "synchronize the clocks of the nodes (NTP)"
		c.Message = fmt.Sprintf("%s %s that of the API server", duration.HumanDuration(skew.Abs().Round(time.Second)), word)
	}
	if skew.Abs() > clockFailure {
		c.Severity, c.Next = finding.Failing, c.Next+": tokens and certificates may be rejected as expired or not yet valid"
	}
	return c
}

// checkAPIs checks that the API server serves the resources that roles and features use.
func (e *examination) checkAPIs() {
	for _, a := range e.plan.APIs {
		name := "api " + a.Resource
		served, err := firstServed(e.Kubernetes, a.Resource, a.GroupVersion, a.Older)
		switch {
		case err != nil:
			e.unknown(name, "reading the resources of %s: %v", a.GroupVersion, err)
		case served != "":
			e.ok(name, "%s is served, for %s", served, a.For)
		case a.Required:
			e.add(name, finding.Failing, a.Hint, "%s is not served; it is required for %s", a.GroupVersion, a.For)
		default:
			e.add(name, finding.Warning, a.Hint, "%s is not served: %s is disabled", a.GroupVersion, a.For)
		}
	}
}

// firstServed returns the first of versions that has the resource, "" if none has it. Empty versions are skipped.
func firstServed(client kubernetes.Interface, resource string, versions ...string) (string, error) {
	for _, version := range versions {
		if version == "" {
			continue
		}
		list, err := client.Discovery().ServerResourcesForGroupVersion(version)
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return "", err
		case slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == resource }):
			return version, nil
		}
	}
	return "", nil
}
