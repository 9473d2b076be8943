// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/metrics"
)

// The rate limit of the reviews: requests with invalid tokens must not load the API server.
const (
	reviewQPS   = 10
	reviewBurst = 20
)

// reviewer authenticates and authorizes clients of the metrics with the API server. The ClusterRole must grant
// create on tokenreviews and subjectaccessreviews.
type reviewer struct{ client kubernetes.Interface }

// newGuard returns the guard of the secure metrics server.
func newGuard(config *rest.Config, version string) (*metrics.Guard, error) {
	client, err := kubernetes.NewForConfig(kube.ForRole(config, version, "reviews", reviewQPS, reviewBurst))
	if err != nil {
		return nil, err
	}
	return metrics.NewGuard(reviewer{client}), nil
}

func (r reviewer) Authenticate(ctx context.Context, token string) (metrics.User, bool, error) {
	review, err := r.client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token},
	}, metav1.CreateOptions{})
	if err != nil {
		return metrics.User{}, false, err
	}
	if !review.Status.Authenticated {
		return metrics.User{}, false, nil // the cause in status.error makes no difference
	}
	u := review.Status.User
	user := metrics.User{Name: u.Username, UID: u.UID, Groups: u.Groups, Extra: map[string][]string{}}
	for key, values := range u.Extra {
		user.Extra[key] = values
	}
	return user, true, nil
}

func (r reviewer) Authorize(ctx context.Context, user metrics.User, verb, path string) (bool, error) {
	extra := map[string]authorizationv1.ExtraValue{}
	for key, values := range user.Extra {
		extra[key] = values
	}
	review, err := r.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user.Name, UID: user.UID, Groups: user.Groups, Extra: extra,
			NonResourceAttributes: &authorizationv1.NonResourceAttributes{Verb: verb, Path: path},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, err
	}
	return review.Status.Allowed && !review.Status.Denied, nil
}
